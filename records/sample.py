import sys

sys.exit(print("error: records/sample.py is now ./run.sh sample", file=sys.stderr) or 2)
