# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_dlock_global_optspecs
    string join \n h/help V/version
end

function __fish_dlock_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_dlock_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_dlock_using_subcommand
    set -l cmd (__fish_dlock_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c dlock -n "__fish_dlock_needs_command" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_needs_command" -s V -l version -d 'Print version'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "run" -d 'Acquire a lock, run a command while it is held, release it, exit as the command did'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "status" -d 'Show who holds locks, since when, for how much longer, who waits, how the last run ended'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "history" -d 'Show the last runs of a lock: when, how long, how each ended, where and by whom'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "check" -d 'Check locks against limits, as a plugin of Nagios, Icinga, Zabbix or Sensu: exits with 0, 1, 2 or 3'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "force-release" -d 'Take a lock away from its holder'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "forget" -d 'Remove the history and the --once keys of a lock that nobody uses; its tokens never go back'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "acquire" -d 'Acquire a lock for steps that cannot be wrapped, and print it as shell assignments'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "renew" -d 'Extend an acquired lock'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "release" -d 'Let go of an acquired lock'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "fence" -d 'Run a command only if its fencing token is not older than what the resource has seen'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "doctor" -d 'Check a backend end to end: reach it, take and release a probe lock, find what weakens the promise'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "completions" -d 'Print the completions of a shell'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "man" -d 'Print the manual page'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "help" -d 'Print the help of dlock, or of one verb'
complete -c dlock -n "__fish_dlock_needs_command" -f -a "words" -d 'What completes a word: asked by the completions'
complete -c dlock -n "__fish_dlock_using_subcommand run" -l name -d 'The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand run" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand run" -l ttl -d 'How long the lock stays taken if dlock dies [default: 30s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -s w -l wait -d 'Give up if the lock was not acquired within DUR; 0 is --no-wait [default: wait for ever]' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l slots -d 'Let up to N holders in at once; each sees its own DLOCK_SLOT' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l signal -d 'Signal sent first to stop the command [default: TERM]' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -s k -l kill-after -d 'SIGKILL follows after DUR [default: a sixth of the ttl, at most 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l timeout -d 'End the command after DUR, as timeout(1) does' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l on-lost -d 'When the lock is already not ours: kill at once, or signal first: kill or signal [default: kill]' -r -f -a "kill\t''
signal\t''"
complete -c dlock -n "__fish_dlock_using_subcommand run" -l leftovers -d 'What happens to processes the command left behind: kill, wait or leave [default: kill]' -r -f -a "kill\t''
wait\t''
leave\t''"
complete -c dlock -n "__fish_dlock_using_subcommand run" -l hold-at-least -d 'After a short command keep the lock until DUR since it was granted' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l once -d 'Run only if no successful run with this key is on record for the lock' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -s E -l conflict-exit-code -d 'Exit code for "not acquired", 0 to 255 [default: 75]' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -s c -l command -d 'Run `$SHELL -c STRING` instead of a command behind `--`' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l metrics-file -d 'Keep Prometheus metrics of this lock in FILE, for the node exporter\'s textfile collector' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l on-event -d 'Run `/bin/sh -c CMD` for warnings, errors, acquired and released, with the event as JSON on its standard input' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l warn-after -d 'Warn once when the command has run for DUR; it goes on' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l note -d 'A note for others: shown by status, in their busy messages and in the history [at most 200 characters]' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -l history -d 'How many of its runs the lock remembers, 0 to 100; the last one always [default: 20]' -r
complete -c dlock -n "__fish_dlock_using_subcommand run" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand run" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand run" -s n -l no-wait -l nb -l nonblock -d 'Give up at once if the lock is busy'
complete -c dlock -n "__fish_dlock_using_subcommand run" -s s -l shared -d 'Hold it together with other --shared holders, exclusive of everybody else'
complete -c dlock -n "__fish_dlock_using_subcommand run" -l reentrant -d 'If an ancestor holds this very lock, run under its lease instead of refusing'
complete -c dlock -n "__fish_dlock_using_subcommand run" -l keep-trying -d 'After a loss or a failure stand for the lock again, for ever; only success or a signal ends it'
complete -c dlock -n "__fish_dlock_using_subcommand run" -l explain -d 'Print the timeline and the settings with where each came from; run nothing'
complete -c dlock -n "__fish_dlock_using_subcommand run" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand status" -l name -d 'One more of them' -r
complete -c dlock -n "__fish_dlock_using_subcommand status" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand status" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand status" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand status" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand status" -l format -d 'How to print: table, json or prometheus [default: table; one lock on a terminal is described]' -r -f -a "table\t''
json\t''
prometheus\t''"
complete -c dlock -n "__fish_dlock_using_subcommand status" -l color -d 'When to use colours: auto, always or never [default: auto, which heeds $NO_COLOR]' -r -f -a "auto\t''
always\t''
never\t''"
complete -c dlock -n "__fish_dlock_using_subcommand status" -l watch -d 'Show it again every EVERY, until interrupted; a word behind it that is no duration is a lock [default: 2s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand status" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand status" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand status" -l json -d 'Print one JSON array: --format json'
complete -c dlock -n "__fish_dlock_using_subcommand status" -l held -d 'Only locks that are held'
complete -c dlock -n "__fish_dlock_using_subcommand status" -l exit-code -d 'Exit with 75 if any of the named locks is held'
complete -c dlock -n "__fish_dlock_using_subcommand status" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand history" -l name -d 'The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /' -r
complete -c dlock -n "__fish_dlock_using_subcommand history" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand history" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand history" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand history" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand history" -s n -l limit -d 'Show the last N runs only' -r
complete -c dlock -n "__fish_dlock_using_subcommand history" -l forget-once -d 'Forget that a run with this --once key succeeded, so that the next one runs again' -r
complete -c dlock -n "__fish_dlock_using_subcommand history" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand history" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand history" -l json -d 'Print one JSON object'
complete -c dlock -n "__fish_dlock_using_subcommand history" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand check" -l name -d 'One more of them' -r
complete -c dlock -n "__fish_dlock_using_subcommand check" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand check" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand check" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand check" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand check" -l held-at-most -d 'CRITICAL if a lock has been held for longer' -r
complete -c dlock -n "__fish_dlock_using_subcommand check" -l last-success-within -d 'CRITICAL if no run has succeeded for longer, or ever' -r
complete -c dlock -n "__fish_dlock_using_subcommand check" -l waiting-at-most -d 'CRITICAL if somebody has waited for longer' -r
complete -c dlock -n "__fish_dlock_using_subcommand check" -l warn -d 'WARNING from this part of each limit on, like 80%' -r
complete -c dlock -n "__fish_dlock_using_subcommand check" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand check" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand check" -l json -d 'Print one JSON object instead of the line'
complete -c dlock -n "__fish_dlock_using_subcommand check" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -l name -d 'The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /' -r
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -l token -d 'Act only if N is still the holder\'s fencing token' -r
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -l reason -d 'Why: told to the holder, and kept in the record of its run; a program other than dlock is not told' -r
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -l now -d 'Free it on the spot instead of telling its holder first: two commands may overlap for a moment'
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -l yes -d 'Do not ask'
complete -c dlock -n "__fish_dlock_using_subcommand force-release" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand forget" -l name -d 'The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /' -r
complete -c dlock -n "__fish_dlock_using_subcommand forget" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand forget" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand forget" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand forget" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand forget" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand forget" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand forget" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -l name -d 'The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /' -r
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -l ttl -d 'How long the lock is ours unless it is renewed [default: 30s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -s w -l wait -d 'Give up if the lock was not acquired within DUR; 0 is --no-wait [default: wait for ever]' -r
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -l slots -d 'Let up to N holders in at once' -r
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -s E -l conflict-exit-code -d 'Exit code for "not acquired", 0 to 255 [default: 75]' -r
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -l note -d 'A note for others: shown by status, in their busy messages and in the history [at most 200 characters]' -r
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -s n -l no-wait -l nb -l nonblock -d 'Give up at once if the lock is busy'
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -s s -l shared -d 'Hold it together with other --shared holders, exclusive of everybody else'
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -l json -d 'Print a JSON object instead of shell assignments'
complete -c dlock -n "__fish_dlock_using_subcommand acquire" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand renew" -l name -d 'The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /' -r
complete -c dlock -n "__fish_dlock_using_subcommand renew" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand renew" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand renew" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand renew" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand renew" -l owner -d 'Who holds it [default: $DLOCK_OWNER]' -r
complete -c dlock -n "__fish_dlock_using_subcommand renew" -l ttl -d 'How long the lock is ours from now on [default: as long as it was acquired or last renewed for]' -r
complete -c dlock -n "__fish_dlock_using_subcommand renew" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand renew" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand renew" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand release" -l name -d 'The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /' -r
complete -c dlock -n "__fish_dlock_using_subcommand release" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand release" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand release" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand release" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand release" -l owner -d 'Who holds it [default: $DLOCK_OWNER]' -r
complete -c dlock -n "__fish_dlock_using_subcommand release" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand release" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand release" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand fence" -l token -d 'The fencing token [default: $DLOCK_FENCING_TOKEN]' -r
complete -c dlock -n "__fish_dlock_using_subcommand fence" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand fence" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -l ttl -d 'The ttl to judge the timeline for [default: 30s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -l json -d 'Print one JSON object'
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -l strict -d 'Exit with 1 if there is anything to warn of'
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -l print-schema -d 'Only print the SQL that an administrator can run where dlock may not (PostgreSQL)'
complete -c dlock -n "__fish_dlock_using_subcommand doctor" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand completions" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand man" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand help" -s h -l help -d 'Print help'
complete -c dlock -n "__fish_dlock_using_subcommand words" -s b -l backend -d 'Backend URL, or the name of a profile in the config file; without one, local files' -r
complete -c dlock -n "__fish_dlock_using_subcommand words" -l connect-timeout -d 'How long the backend may take to answer the first time [default: 5s]' -r
complete -c dlock -n "__fish_dlock_using_subcommand words" -l config -d 'Read this config file instead of the usual one' -r -F
complete -c dlock -n "__fish_dlock_using_subcommand words" -l log -d 'How to write on standard error: text or json [default: text]' -r -f -a "text\t''
json\t''"
complete -c dlock -n "__fish_dlock_using_subcommand words" -s v -l verbose -d 'Say more on standard error'
complete -c dlock -n "__fish_dlock_using_subcommand words" -s q -l quiet -d 'Say nothing on standard error but errors'
complete -c dlock -n "__fish_dlock_using_subcommand words" -s h -l help -d 'Print help (see more with \'--help\')'
function __fish_dlock_names
    set -l words (commandline -opc)
    set -l where
    for i in (seq (count $words))
        switch $words[$i]
            case -b --backend --config
                test $i -lt (count $words); and set -a where $words[$i] $words[(math $i + 1)]
            case '--backend=*' '--config=*'
                set -a where $words[$i]
        end
    end
    dlock words names $where 2>/dev/null
end
for verb in run acquire renew release status history check forget force-release
    complete -c dlock -n "__fish_dlock_using_subcommand $verb" -l name -x -a '(__fish_dlock_names)'
    complete -c dlock -n "__fish_dlock_using_subcommand $verb; and not contains -- -- (commandline -opc)" -f -a '(__fish_dlock_names)'
end
complete -c dlock -s b -l backend -x -a '(dlock words profiles 2>/dev/null)'
