"""The command `lmdeploy`, also as `python -m lmdeploy`."""

import sys


def main() -> int:
    """Run the command line; Ctrl-C is no traceback, not even while modules are still being loaded."""
    try:
        from lmdeploy.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
