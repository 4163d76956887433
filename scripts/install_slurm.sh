#!/bin/sh
# Install what tests/one_node_slurm.py starts: Debian's and Ubuntu's Slurm and munge. Nothing is asked: where that would
# take a password, or there is no apt, it says so and fails. Slurm's own services do not start without a slurm.conf.
set -eu
PATH="$PATH:/usr/sbin:/sbin"
if command -v slurmctld && command -v slurmd && command -v sbatch && command -v munged; then exit 0; fi >/dev/null

if ! command -v apt-get >/dev/null; then
    echo "install_slurm: there is no apt-get here; install slurmctld, slurmd, Slurm's commands and munge by other means" >&2
    exit 1
fi
as_root=""
if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "install_slurm: this takes root: sudo sh scripts/install_slurm.sh" >&2
        exit 1
    fi
    as_root="sudo -n"
fi
echo "install_slurm: slurmctld, slurmd, slurm-client and munge, by apt" >&2
install() {
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        slurmctld slurmd slurm-client munge >/dev/null </dev/null
}
install || { $as_root apt-get update -qq </dev/null && install; }
