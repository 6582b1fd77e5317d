#!/bin/sh
# A whole host in POSIX sh and awk: says the task back and seals nothing.
# Written from contracts/sidecar.md alone. Strings are copied as they are escaped, never read.
LC_ALL=C
export LC_ALL

# Reads one line of strict JSON, remembers its values by path, and writes the answer to it.
# A path is its keys with a tab before each, as no string of JSON holds a bare tab.
answer='
function fail() { fatal("null", "unreadable line", "protocol_invalid_envelope"); exit }
function skip() { while (P <= N && index(" \t\r", substr(L, P, 1))) P++ }
function text(   from, w) {
  if (substr(L, P++, 1) != "\"") fail()
  for (from = P; P <= N; ) {
    w = substr(L, P, 512)
    if (!match(w, /["\\\001-\037]/)) { P += length(w); continue }
    P += RSTART
    w = substr(w, RSTART, 1)
    if (w == "\"") return substr(L, from, P - 1 - from)
    if (w != "\\" || !match(substr(L, P, 5), /^(["\\\/bfnrt]|u[0-9a-fA-F][0-9a-fA-F][0-9a-fA-F][0-9a-fA-F])/)) fail()
    P += RLENGTH
  }
  fail()
}
function plain(s,   n) { # a key or a t as it is meant, where it is written with escapes of ASCII
  while (match(s, /\\u00[2-7][0-9a-fA-F]/)) {
    n = substr(s, RSTART + 4, 1) * 16 + index("123456789abcdef", tolower(substr(s, RSTART + 5, 1)))
    s = substr(s, 1, RSTART - 1) sprintf("%c", n) substr(s, RSTART + 6)
  }
  return s
}
function value(path, depth,   c, key) {
  if (depth > 128) fail()
  skip()
  c = kind[path] = substr(L, P, 1)
  if (c == "\"") { raw[path] = text(); return }
  if (c == "{" || c == "[") {
    P++; skip()
    if (substr(L, P, 1) == (c == "{" ? "}" : "]")) { P++; return }
    do {
      key = "[]"
      if (c == "{") { skip(); key = plain(text()); skip(); if (substr(L, P++, 1) != ":") fail() }
      value(path "\t" key, depth + 1); skip()
    } while (substr(L, P++, 1) == ",")
    if (substr(L, P - 1, 1) != (c == "{" ? "}" : "]")) fail()
    return
  }
  if (!match(substr(L, P, 400), /^(true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?)/) || !RLENGTH) fail()
  raw[path] = substr(L, P, RLENGTH); P += RLENGTH
}
function check_characters(   s) { # UTF-8, and no escape that is half a character
  s = L
  gsub(/[\302-\337][\200-\277]|\340[\240-\277][\200-\277]|\355[\200-\237][\200-\277]|\360[\220-\277][\200-\277][\200-\277]/, "", s)
  gsub(/[\341-\354\356\357][\200-\277][\200-\277]|[\361-\363][\200-\277][\200-\277][\200-\277]|\364[\200-\217][\200-\277][\200-\277]/, "", s)
  gsub(/\\\\/, "", s)
  gsub(/\\u[dD][89abAB]..\\u[dD][c-fC-F]../, "", s)
  if (s ~ /[\200-\377]|\\u[dD][89a-fA-F]/) fail()
}
function say(type, member, words) {
  print "{\"t\":\"event\",\"ref_id\":\"" id "\",\"event\":{\"ts\":\"" now "\",\"type\":\"" type "\",\"" member "\":\"" words "\"}}"
}
function fatal(ref, words, code) {
  print "{\"t\":\"fatal\",\"ref_id\":" ref ",\"error\":\"" words "\",\"error_code\":\"" code "\"}"
}
function is_uuid(s) { return length(s) == 36 && s ~ /^[0-9a-fA-F]+-[0-9a-fA-F]+-[0-9a-fA-F]+-[0-9a-fA-F]+-[0-9a-fA-F]+$/ }
function run(   order) {
  id = raw["\tid"]; order = raw["\twork_order\tid"]
  if (kind["\tid"] != "\"" || kind["\twork_order\ttask"] != "\"" || !is_uuid(order)) {
    fatal(kind["\tid"] == "\"" ? "\"" id "\"" : "null", "a run needs an id and an order with an id and a task", "contract_schema_violation")
    return
  }
  say("run_started", "message", "echo")
  say("assistant_message", "text", raw["\twork_order\ttask"])
  say("run_completed", "message", "done")
  if (is_uuid(id)) uuid = id
  print "{\"t\":\"final\",\"ref_id\":\"" id "\",\"receipt\":{\"meta\":{\"run_id\":\"" uuid "\",\"work_order_id\":\"" order "\"," \
    "\"contract_version\":\"abp/v0.1\",\"started_at\":\"" now "\",\"finished_at\":\"" now "\",\"duration_ms\":0}," \
    "\"backend\":{\"id\":\"echo:sh\"},\"capabilities\":{\"streaming\":\"native\"},\"usage_raw\":{},\"usage\":{},\"trace\":[]," \
    "\"artifacts\":[],\"verification\":{\"harness_ok\":true},\"outcome\":\"complete\"}}"
}
{
  L = $0; N = length(L); P = 1
  if (N > 16777216) fail() # S4
  check_characters(); value("", 1); skip()
  if (P <= N) fail()
  if (kind[""] == "{" && kind["\tt"] == "\"" && plain(raw["\tt"]) == "run") run()
}'

printf '%s\n' '{"t":"hello","contract_version":"abp/v0.1","backend":{"id":"echo:sh"},"capabilities":{"streaming":"native"},"mode":"mapped","heeds":[]}'
# S35: a last line without its newline counts. S37: the pipe is broken when awk cannot write.
while IFS= read -r line || [ -n "$line" ]; do
  case $line in *[![:space:]]*) ;; *) continue ;; esac # S7
  uuid=$(od -An -v -tx1 -N16 /dev/urandom | tr -d ' \n' | sed 's/^\(.\{8\}\)\(.\{4\}\)\(.\{4\}\)\(.\{4\}\)/\1-\2-\3-\4-/')
  printf '%s\n' "$line" | awk -v now="$(date -u +%Y-%m-%dT%H:%M:%SZ)" -v uuid="$uuid" "$answer" || exit 1
done
