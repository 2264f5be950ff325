# dlock knows itself what can stand in a place; a "/" asks for files. The command after -- is completed as without dlock.
_dlock() {
    local line="${COMP_LINE:0:COMP_POINT}" words found value i
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ ${COMP_WORDS[i]} == -- ]]; then
            if declare -F _command_offset >/dev/null; then
                _command_offset $((i + 1))
            elif ((COMP_CWORD == i + 1)); then
                compopt -o default
                mapfile -t COMPREPLY < <(compgen -c -- "${COMP_WORDS[COMP_CWORD]}")
            else
                compopt -o default
            fi
            return
        fi
    done
    # The words as they were typed: bash splits --name=a:b into five.
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    value="${words[-1]}"
    mapfile -t found < <(dlock words -- "${words[@]:1}" 2>/dev/null)
    if [[ ${found[0]} == / ]]; then
        compopt -o default
        return
    fi
    mapfile -t COMPREPLY < <(compgen -W "${found[*]%%$'\t'*}" -- "$value")
    # bash replaces only what follows the last character that breaks words; a @ belongs to what it begins.
    local typed="" start sign
    for sign in : = @; do
        [[ $COMP_WORDBREAKS == *$sign* && $value == *$sign* ]] || continue
        start="${value%"${value##*"$sign"}"}"
        [[ $sign == @ ]] && start="${start%@}"
        ((${#start} > ${#typed})) && typed="$start"
    done
    COMPREPLY=("${COMPREPLY[@]#"$typed"}")
}
complete -F _dlock dlock
