# The backend that the line names.
_dlock_where() {
    local i
    where=()
    for ((i = 1; i < CURRENT; i++)); do
        case $words[i] in
            -b|--backend|--config) ((i + 1 < CURRENT)) && where+=($words[i] $words[i+1]) ;;
            --backend=*|--config=*) where+=($words[i]) ;;
        esac
    done
}

_dlock_names() {
    local -a where
    _dlock_where
    compadd -- ${(f)"$(dlock words names $where 2>/dev/null)"}
}

_dlock_profiles() {
    compadd -- ${(f)"$(dlock words profiles 2>/dev/null)"}
}
