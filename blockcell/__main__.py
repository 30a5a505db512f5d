"""`python -m blockcell` is the command `blockcell`."""

from .command import main

if __name__ == "__main__":
    raise SystemExit(main())
