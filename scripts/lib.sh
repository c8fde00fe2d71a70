# Shared by the scripts; sourced, not run. Changes to the checkout's root, so they work from any folder.
# shellcheck shell=bash
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=.venv/bin/python

say() { printf '%s\n' "== $*" >&2; }
die() { printf '%s\n' "error: $*" >&2; exit 1; }

# Answers -h and --help with the comment at the head of the script, before anything is installed, built or stopped.
for argument in "$@"; do
  case $argument in -h | --help) sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0 ;; esac
done

# Succeeds when $1 runs, is Python 3.10 to 3.12 and can make environments.
fits() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

# Succeeds when the libpython that Triton's Python stub is linked with comes along with $1.
has_libpython() {
  "$1" - 2>/dev/null <<'PYTHON'
import ctypes.util, pathlib, sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
library = pathlib.Path(sysconfig.get_config_var("LIBDIR") or "/", f"libpython{version}.so.1.0")
sys.exit(not (library.exists() or ctypes.util.find_library(f"python{version}")))
PYTHON
}

# Prints the Python to use. Each candidate is really run: a pyenv shim may exist and yet fail.
find_python() {
  local candidate without=
  for candidate in ${TRITON_REALTIME_PYTHON:-python3.11 python3.12 python3.10 python3 python}; do
    fits "$candidate" || continue
    if has_libpython "$candidate"; then command -v "$candidate"; return; fi
    without=${without:-$candidate}
  done
  [ -z "$without" ] || die "$without comes without libpython, which Triton's Python stub is linked with.
fix: apt-get install libpython3.11 python3.11-venv, or name another with TRITON_REALTIME_PYTHON=/path/to/python3"
  die "no fitting Python: tried ${TRITON_REALTIME_PYTHON:-python3.11, python3.12, python3.10, python3 and python}.
fix: install Python 3.10, 3.11 or 3.12 with its venv module (apt-get install python3-venv), or name one with
TRITON_REALTIME_PYTHON=/path/to/python3"
}

# set_up EXTRAS: .venv with the package and EXTRAS, from constraints.txt. A stamp, written last, says what is
# installed: nothing is done twice, and an interrupted installation does not count. More extras serve as well.
# One at a time: the others wait, and then find it done.
set_up() {
  exec 9<"$root/scripts/lib.sh"
  flock --nonblock 9 || { say "another set-up of .venv is running; waiting for it"; flock 9; }
  install_extras "$1"
  exec 9<&-
}

install_extras() {
  local wanted chosen
  wanted=$(cat pyproject.toml constraints.txt | sha256sum)
  if [ "$(cat ".venv/installed-$1"* 2>/dev/null)" = "$wanted" ] && [ -x "$python" ]; then return; fi
  if ! fits "$python"; then
    chosen=$(find_python)
    say "making .venv with $chosen ($("$chosen" --version))"
    rm -rf .venv
    "$chosen" -m venv .venv
  fi
  rm -f .venv/installed-*
  say "installing triton-realtime[$1] into .venv (downloads on the first run)"
  "$python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$1]" >&2
  printf '%s\n' "$wanted" >".venv/installed-$1"
}

build_target() { "$python" -m build --target "$1"; }

# wait_until_ready PID RUN_DIR: until `serve`, which logs to RUN_DIR/serve.log, is ready; shows that log if it ends.
wait_until_ready() {
  until [ -e "$2/serve.json" ]; do
    if ! kill -0 "$1" 2>/dev/null; then
      cat "$2/serve.log" >&2
      die "the server ended before it was ready"
    fi
    sleep 0.1
  done
}

# is_ours PID RUN_DIR: is this process a `serve` of ours with that run-dir, rather than a reused process id?
is_ours() { tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline" | grep -qF -- "-m orchestrator serve artifacts/" &&
  tr '\0' '\n' 2>/dev/null <"/proc/$1/cmdline" | grep -qxF -- "$2"; }
