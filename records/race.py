import sys

sys.exit(print("error: records/race.py is now ./run.sh race", file=sys.stderr) or 2)
