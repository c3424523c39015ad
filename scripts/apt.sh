# Sourced: Debian packages without root and without touching what is installed.

# apt-get whose lists and downloads stay in $apt_home.
private_apt() {
    LC_ALL=C apt-get -qq -o "Dir::State::lists=$apt_home/lists" -o "Dir::Cache=$apt_home/cache" -o Debug::NoLocking=1 \
        -o "APT::Sandbox::User=$(id -un)" "$@"
}

# unpack_packages DIR PACKAGE...: what `apt-get install` would add to this machine, unpacked under DIR instead.
unpack_packages() (
    target=$1
    shift
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    apt_home=$(mktemp -d)
    trap 'rm -rf "$apt_home"' EXIT
    mkdir -p "$apt_home/lists/partial" "$apt_home/cache/archives/partial" "$apt_home/debs" "$target"
    private_apt update || return 1
    missing=$(private_apt -s install --no-install-recommends "$@" | awk '/^Inst / { print $2 }') || return 1
    cd "$apt_home/debs"
    private_apt download $missing || return 1
    for package in *.deb; do
        dpkg-deb -x "$package" "$target" || return 1
    done
)
