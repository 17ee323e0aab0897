#!/bin/bash
# A sweep over many numbers of tokens, one task of a Slurm array for each; all store into one
# PostgreSQL database, whose URL is in FLEXQ_BENCH_DB.
#   sbatch --export=ALL,FLEXQ_BENCH_DB,MODEL=llama-2-7b ci/cluster/slurm-array.sh
#SBATCH --job-name=flexq-bench
#SBATCH --array=0-5
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=flexq-bench-%A-%a.log
set -euo pipefail
: "${FLEXQ_BENCH_DB:?name a PostgreSQL database: a file on a shared disk is locked by one task}"
sizes=(1 4 8 16 64 128)
exec "${FLEXQ_BENCH:-flexq-bench}" sweep --model "${MODEL:-llama-2-7b}" \
  --m "${sizes[${SLURM_ARRAY_TASK_ID:?start it with sbatch}]}" \
  --kernels "${KERNELS:-flexq,cublaslt-w8a8}"
