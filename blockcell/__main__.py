"""`python -m blockcell` is the command `blockcell`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
