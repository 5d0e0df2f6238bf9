#!/bin/sh
# What the image runs: docker run replica [FLAG... | COMMAND...]
#
# Flags alone are those of the main job, four replicas of train.py or as many as $NP.
# A folder mounted at /data holds the data of any job. mpirun hands `docker stop` on to
# the replicas; horovodrun leaves a shell in between, which does not.
[ ! -e /data ] || export REPLICA_DATA_DIR=/data
case "${1:-}" in
"" | -*) set -- mpirun -np "${NP:-4}" python train.py "$@" ;;
esac
exec "$@"
