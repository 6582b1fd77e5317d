#!/bin/sh
# A step of a build: one order, its receipt and patch as artifacts, a summary for people, a test report for the system.
# Usage: ci.sh TASK FOLDER
set -u
task=$1 out=$2
mkdir -p "$out"
# What an earlier step has left here is not to be taken for the result of this one.
rm -f "$out/run-id" "$out/receipt.json" "$out/change.patch" "$out/junit.xml" "$out/run.html"
backplane run "$task" --policy ci --run-id-file "$out/run-id" --receipt "$out/receipt.json" --patch "$out/change.patch"
code=$?
[ -s "$out/run-id" ] || exit $code # It never began, so there is nothing to report.
run=$(cat "$out/run-id")
backplane report "$run" --summary >>"${GITHUB_STEP_SUMMARY:-$out/summary.md}"
backplane report "$run" --junit >"$out/junit.xml"
backplane report "$run" >"$out/run.html"
backplane receipts verify "$out/receipt.json" || code=1
exit $code
