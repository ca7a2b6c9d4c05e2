#!/bin/sh
# The Python of the tests, for run.sh, which need not wait until all its packages are imported.
case "$3" in *fits.py) echo "Python 3" ;; *) exec "$TEST_PYTHON" "$@" ;; esac
