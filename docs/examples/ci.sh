#!/bin/sh
# A step of a build: one order, its receipt and patch as artifacts, a summary for people, a test report for the system.
# Usage: ci.sh TASK FOLDER
set -u
task=$1 out=$2
mkdir -p "$out"
backplane run "$task" --policy ci --receipt "$out/receipt.json" --patch "$out/change.patch"
code=$?
backplane report last --summary >>"${GITHUB_STEP_SUMMARY:-$out/summary.md}"
backplane report last --junit >"$out/junit.xml"
backplane report last >"$out/run.html"
backplane receipts verify "$out/receipt.json" || code=1
exit $code
