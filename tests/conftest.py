import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = ROOT  # for the processes of tests.ranks
os.environ.setdefault("WANDB_MODE", "offline")
