import sys

sys.exit(print("error: records/compare.py is now ./run.sh compare", file=sys.stderr) or 2)
