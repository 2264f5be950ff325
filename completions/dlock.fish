# dlock knows itself what can stand in a place; a "/" asks for files. The command after -- is completed as without dlock.
function __fish_dlock
    set -l before (commandline -opc)
    set -l current (commandline -ct)
    if set -l dashes (contains -i -- -- $before)
        set -e before[1..$dashes]
        __fish_complete_subcommand --commandline $before $current
        return
    end
    for line in (dlock words -- $before[2..] $current 2>/dev/null)
        if test "$line" = /
            set -l option (string match -r -- '^--[^=]*=' $current)
            set -l files (__fish_complete_path (string replace -r -- '^--[^=]*=' '' $current))
            string replace -r -- '^' "$option" $files
        else
            echo $line
        end
    end
end
complete -c dlock -f -a '(__fish_dlock)'
