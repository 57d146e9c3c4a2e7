#!/bin/sh
# Gives etcd its users and turns authentication on, then stays: the pod is ready once it is done. May run again at any time.
# Wants ROOT_PASSWORD, USER_NAME, USER_PASSWORD, KEY_PREFIX, DONE_FILE, and the ETCDCTL_ variables of endpoint and TLS.
set -eu
export ETCDCTL_API=3
trap 'rm -f "$DONE_FILE"; exit 0' TERM INT

as_root() { ETCDCTL_USER="root:$ROOT_PASSWORD" etcdctl "$@"; }
run() { if [ "$enabled" = yes ]; then as_root "$@"; else etcdctl "$@"; fi; }

setup() {
  # etcdctl takes a password that nobody asks for, so only who shows none learns whether one is needed.
  if etcdctl user list >/dev/null 2>&1; then enabled=no; else enabled=yes; fi
  run user list >/dev/null || return 1
  if [ "$enabled" = no ]; then
    run user get root >/dev/null 2>&1 || printf '%s' "$ROOT_PASSWORD" | run user add root --interactive=false || return 1
    run role get root >/dev/null 2>&1 || run role add root || return 1
    run user grant-role root root || return 1
  fi
  run user get "$USER_NAME" >/dev/null 2>&1 || printf '%s' "$USER_PASSWORD" | run user add "$USER_NAME" --interactive=false || return 1
  # A password that was changed in the Secret becomes the user's.
  printf '%s' "$USER_PASSWORD" | run user passwd "$USER_NAME" --interactive=false || return 1
  run role get "$USER_NAME" >/dev/null 2>&1 || run role add "$USER_NAME" || return 1
  run role grant-permission --prefix=true "$USER_NAME" readwrite "$KEY_PREFIX" || return 1
  run user grant-role "$USER_NAME" "$USER_NAME" || return 1
  [ "$enabled" = yes ] || run auth enable || return 1
}

rm -f "$DONE_FILE"
until setup; do sleep 1 & wait $!; done
touch "$DONE_FILE"
sleep infinity &
wait $!
