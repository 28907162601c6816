"""Run the command line by ``python -m lazyckpt``."""

from .cli import main

if __name__ == "__main__":
    main()
