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
