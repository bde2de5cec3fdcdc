"""`python -m slim_scheduler` is `slim`."""

from slim_scheduler.cli import main

if __name__ == "__main__":
    main()
