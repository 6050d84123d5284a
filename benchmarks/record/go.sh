# bash vendor/go.sh LIST WORKERS MINUTES [features|lab]: sets up /tmp/lab from vendor/ alone, then does the runs of LIST.
set -u
begun=$(date +%s)
V=$PWD/vendor; LAB=${LAB:-/tmp/lab}; PY=${PY:-python3}; LIST=$1; W=$2; M=$3
if [ ! -d $LAB/src ]; then
  mkdir -p $LAB && cd $LAB
  for f in src pk mnist fashion-mnist; do tar xJf $V/$f.tar.xz & done; wait
  mkdir -p data && mv mnist fashion-mnist data/
  [ -f $V/cache.tar.xz ] && tar xJf $V/cache.tar.xz
  (nvidia-cuda-mps-control -d && echo mps started) 2>&1
fi
cd $LAB; cp $V/*.py $V/*.jsonl $LAB/ 2>/dev/null
export PYTHONPATH=$LAB/src/src:$LAB/pk PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TORCHINDUCTOR_CACHE_DIR=$LAB/cache TRITON_CACHE_DIR=$LAB/cache/triton DPSCALE_DATA=$LAB/data
export PYTHONWARNINGS=ignore
export RECORD_COMMIT=$(git -C $LAB/src rev-parse HEAD 2>/dev/null || echo 52cb490)
echo "setup $(( $(date +%s) - begun )) s, commit $RECORD_COMMIT"
nvidia-smi --query-gpu=timestamp,utilization.gpu,memory.used --format=csv,noheader -l 5 > $OUT/smi.csv 2>/dev/null &
SMI=$!
[ -f work/mnist-train.pt ] || $PY record.py features --data data --work work ${LIMIT:-}
[ "${4:-}" = test ] && $PY record.py features --data data --work work --test ${LIMIT:-}
echo "features $(( $(date +%s) - begun )) s"
$PY record.py work --data data --work work --list $LIST --out $OUT/${LIST%.jsonl}-records.jsonl --workers $W --minutes $M 2>&1 | tee $OUT/log.txt
cp $OUT/*-records.jsonl $LAB/
echo "done $(( $(date +%s) - begun )) s"
kill $SMI 2>/dev/null; du -sh cache
$PY lists.py table $OUT/*-records.jsonl
echo "end $(( $(date +%s) - begun )) s"
