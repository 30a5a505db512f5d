/* The types that a module is compiled for.  setup.py sets STORAGE, the number of a type in `DTYPES` of
   blockcell/optable.py; modules without kernels are compiled without it. */
#pragma once
#include <stdint.h>
#ifndef STORAGE
#define STORAGE 0
#endif
enum { FLOAT, DOUBLE, HALF, COMPUTES_FLOAT = STORAGE != DOUBLE, STORES_HALF = STORAGE == HALF };
#if STORAGE == 1
typedef double real, store;
#elif STORAGE == 2
typedef float real;
typedef uint16_t store;
#else
typedef float real, store;
#endif
