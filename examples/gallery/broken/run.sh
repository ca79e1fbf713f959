#!/bin/sh
# An engine that never starts: thirty lines of complaint, then status 3. For tests of the way errors travel.
line=1
while [ "$line" -le 30 ]; do
    echo "broken: line $line of 30" >&2
    line=$((line + 1))
done
exit 3
