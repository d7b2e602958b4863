#!/usr/bin/env bash
# Restore drill: everything that a deployment's store holds is exported, imported into another store, and checked there.
# The first store is only read. What comes out is a restored store, and how long restoring takes.
#
#   restore_drill.sh FROM TO FOLDER
#
# FROM, TO  a store: the data directory of a manager that is stopped (/var/lib/kvcm), a file of settings that names a store
#           (prod.conf, as `kvcm serve -c` takes it: the place for a password), or an address (redis://host/?cluster_name=x)
# FOLDER    for the backup; made readable by you alone
#
# TO is another deployment until you use it in the place of FROM: never let managers serve both, each would delete bytes
# that the other serves. A drill that was cut off is run again; TO keeps what it has.
set -euo pipefail

[ $# = 3 ] || { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

store() {  # the options of `kvcm index` for a store, one per line
  case $1 in
    redis*://*) printf '%s\n' -e "kvcm.registry_storage.uri=$1" ;;
    *) if [ -f "$1" ]; then printf '%s\n' -c "$1"; else printf '%s\n' --data-dir "$1"; fi ;;
  esac
}
mapfile -t from < <(store "$1")
mapfile -t to < <(store "$2")
named() { printf '%s' "$1" | sed -E 's#://[^/]*@#://***@#; s#(password=)[^&]*#\1***#g'; }  # without the password that an address may have
first=$(named "$1") second=$(named "$2")
folder=$3
umask 077
mkdir -p "$folder"
backup=$folder/backup.kvcm

step() { printf '%4d s  %s\n' "$((SECONDS - began))" "$*"; }
began=$SECONDS

step "verify $first"
kvcm index verify "${from[@]}" > "$folder/verify-before.txt"

step "export to $backup"
kvcm index export "$backup" --with-accounts --force "${from[@]}"

step "import into $second, dry run"
kvcm index import "$backup" --dry-run "${to[@]}" > "$folder/would-import.txt"

restoring=$SECONDS
step "import into $second"
kvcm index import "$backup" "${to[@]}" | tee "$folder/import.txt"

step "everything of the backup is there"
kvcm index import "$backup" --dry-run --json "${to[@]}" > "$folder/compare.json"
grep -q '"is_all_there": true' "$folder/compare.json" || { cat "$folder/compare.json" >&2; exit 1; }

step "verify $second"
kvcm index verify "${to[@]}" > "$folder/verify-after.txt"

step "restored and checked in $((SECONDS - restoring)) s from $(wc -c < "$backup") bytes"
