"""`python -m lazymerge`: the same as `lazymerge`."""

from lazymerge.cli import main

if __name__ == "__main__":
    main()
