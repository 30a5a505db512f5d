/* Which CPU levels this CPU runs beyond base: asked by _cpu.pyx, and by setup.py before anything is built.

   What tells the psABI levels x86-64-v3 and v4 apart in practice. The compiler's own name for a level would do, but clang
   learned it late. Includes the check that the operating system saves the wide registers. */
#if defined(__x86_64__) && defined(__GNUC__)
    static int runs_v3(void) {
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi")
            && __builtin_cpu_supports("bmi2");
    }
    static int runs_v4(void) {
        return runs_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
            && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq")
            && __builtin_cpu_supports("avx512vl");
    }
#else
    static int runs_v3(void) { return 0; }
    static int runs_v4(void) { return 0; }
#endif
