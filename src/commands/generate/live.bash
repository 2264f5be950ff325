
# What dlock itself knows: names of locks and profiles. Everything else is left to the function above.
_dlock_live() {
    local line="${COMP_LINE:0:COMP_POINT}" words flag value found="" where=() i
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    local last=$((${#words[@]} - 1))
    for ((i = 1; i < last; i++)); do
        case "${words[i]}" in
            --) _dlock "$@"; return ;;
            -b | --backend | --config) ((i + 1 < last)) && where+=("${words[i]}" "${words[i + 1]}") ;;
            --backend=* | --config=*) where+=("${words[i]}") ;;
        esac
    done
    # The words as they were typed: bash takes --name=a:b for five.
    flag="${words[last - 1]}" value="${words[last]}"
    [[ $value == --*=* ]] && flag="${value%%=*}" value="${value#*=}"
    case "$flag" in
        --name) found="$(dlock words names "${where[@]}" 2>/dev/null)" ;;
        -b | --backend) found="$(dlock words profiles 2>/dev/null)" ;;
        @CHOICES@
        @VALUED@) _dlock "$@"; return ;;
        *)
            case "${words[1]},$value" in
                *,-*) _dlock "$@"; return ;;
                status,* | history,* | check,* | forget,* | force-release,* | run,* | acquire,* | renew,* | release,*)
                    ((last > 1)) && found="$(dlock words names "${where[@]}" 2>/dev/null)" || { _dlock "$@"; return; } ;;
                *) _dlock "$@"; return ;;
            esac ;;
    esac
    compopt +o default +o bashdefault 2>/dev/null
    # bash replaces only what stands behind the last sign that breaks words; a @ belongs to what it begins.
    local typed="" start sign
    for sign in : = @; do
        [[ $COMP_WORDBREAKS == *$sign* && $value == *$sign* ]] || continue
        start="${value%"${value##*"$sign"}"}"
        [[ $sign == @ ]] && start="${start%@}"
        ((${#start} > ${#typed})) && typed="$start"
    done
    COMPREPLY=($(compgen -W "$found" -- "$value"))
    COMPREPLY=("${COMPREPLY[@]#"$typed"}")
}
complete -F _dlock_live -o bashdefault -o default dlock
