/* The type in which a module computes: setup.py sets REAL to float or double; modules without kernels have none. */
#pragma once
#ifndef REAL
#define REAL float
#endif
typedef REAL real;
enum { COMPUTES_FLOAT = sizeof(real) == sizeof(float) };
