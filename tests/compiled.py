"""Imported before processes are forked: they compile each module once for all tests, whatever the environment says."""

import os
import sys

sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ["XDG_CACHE_HOME"]
