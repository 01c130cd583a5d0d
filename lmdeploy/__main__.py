"""`python -m lmdeploy` is the command `lmdeploy`."""

import sys

from lmdeploy.cli.main import main

sys.exit(main())
