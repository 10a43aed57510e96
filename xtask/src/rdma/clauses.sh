# clauses PROGRAM SUITE PATTERN LIMIT: runs each test of a suite whose name matches in a process of
# its own. Writes a line for each to /out/results: its name, its result, its seconds. What failed
# tests and gaps say is in /out/said.
clauses() {
    "$1" --list > /tmp/list 2> /tmp/said || cat /tmp/said >> /out/said
    sed -n "s/: test$//p" /tmp/list | grep "^$2::" | grep -E -e "$3" > /tmp/names
    while read -r name
    do
        rm -f /tmp/notes
        begun=$(date +%s)
        KVX_SKIPS=/tmp/notes timeout -k 10 "$4" \
            "$1" --exact "$name" --test-threads=1 > /tmp/said 2>&1
        status=$?
        : > /tmp/note
        if [ $status = 0 ]
        then
            result=holds
            grep -s "^SKIP [^ ]*$name" /tmp/notes >> /tmp/note && result=skipped
            grep -s "^GAP [^ ]*$name" /tmp/notes >> /tmp/note && result=gap
        else
            result="FAILED($status)"
        fi
        echo "$name $result $(($(date +%s) - begun))" | tee -a /out/results
        [ "$result" = holds ] || cat /tmp/note >> /out/said
        [ $status = 0 ] || grep -v "^SKIP" /tmp/said | tail -n 40 | cut -c1-600 >> /out/said
    done < /tmp/names
}
