/* LD_PRELOADed: of the thread that called malloc_fails_at(n), the n-th allocation from then on fails. glibc only. */
#include <errno.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

/* A model that needs no memory itself. */
static __thread long at __attribute__((tls_model("initial-exec")));
static __thread long seen __attribute__((tls_model("initial-exec")));

void malloc_fails_at(long n) { seen = 0, at = n; }
long mallocs_seen(void) { return at = 0, seen; }

static int fails(void) {
    if (at == 0 || ++seen != at)
        return 0;
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size) { return fails() ? NULL : __libc_malloc(size); }
void *calloc(size_t n, size_t size) { return fails() ? NULL : __libc_calloc(n, size); }
void *realloc(void *old, size_t size) { return fails() ? NULL : __libc_realloc(old, size); }
void *memalign(size_t alignment, size_t size) { return fails() ? NULL : __libc_memalign(alignment, size); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **result, size_t alignment, size_t size) {
    void *memory = memalign(alignment, size);
    if (memory == NULL)
        return ENOMEM;
    *result = memory;
    return 0;
}
