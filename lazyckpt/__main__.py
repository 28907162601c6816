"""``python -m lazyckpt`` is ``lazyckpt``."""

from .cli import main

if __name__ == "__main__":
    main()
