"""`python -m promptmill.sim`."""

import sys

from promptmill.sim.server import main

sys.exit(main())
