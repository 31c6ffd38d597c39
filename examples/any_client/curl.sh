#!/bin/sh
# Registers documents.json with the server, then asks question.json twice; prints the answers, with their usage.
set -eu
: "${BASE_URL:=http://127.0.0.1:8000/v1}" "${API_KEY:=none}" "${MODEL:=demo_model}"
here=$(dirname "$0")

post() { # path; the body is standard input
  curl --silent --show-error --fail-with-body "$BASE_URL/$1" --data @- \
    --header "Authorization: Bearer $API_KEY" --header "Content-Type: application/json" --header "x-ragcache-stats: 1"
  echo
}

post ragcache/documents/register < "$here/documents.json"
for time in 1 2; do
  sed "s|MODEL|$MODEL|" "$here/question.json" | post chat/completions
done
