"""`python -m opdctl`: the command line, where no `opdctl` script is on the path."""

from opdctl.cli import main

if __name__ == "__main__":
    main()
