import sys

print("error: records/sample.py is now ./run.sh sample", file=sys.stderr)
sys.exit(2)
