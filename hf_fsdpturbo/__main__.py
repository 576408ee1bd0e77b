"""``python -m hf_fsdpturbo`` is ``hf-fsdpturbo``."""

from __future__ import annotations

import sys

from hf_fsdpturbo.cli import main

if __name__ == "__main__":
    sys.exit(main())
