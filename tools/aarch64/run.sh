#!/usr/bin/env bash
# Whether xdeepserve computes the same bits on aarch64 as on this computer, an x86-64 (README.md).
#
#     tools/aarch64/run.sh [FOLDER]
#
# Everything is made in FOLDER. Nothing is installed on this computer, and nobody needs to be root: packages
# are unpacked, and QEMU runs programs of aarch64 as ordinary processes that see this computer's files.
set -euo pipefail
folder=$(realpath -m "${1:-/tmp/xdeepserve-aarch64}")
cd "$(dirname "$0")/../.."
tree=$PWD
python=${PYTHON:-$tree/.venv/bin/python}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
for needed in apt-get dpkg "$python" "$keyring"; do
    if ! [ -e "$needed" ] && ! command -v "$needed" > /dev/null; then
        echo "$needed is missing: see tools/aarch64/README.md" >&2
        exit 1
    fi
done

# apt with a configuration of its own, so that this computer's knows of no other architecture.
make_apt() {
    mkdir -p "$folder"/apt/{state,cache}
    : > "$folder/apt/status" # nothing is installed: everything that Python needs is downloaded
    cat > "$folder/apt/sources.list" << END
deb [signed-by=$keyring] http://deb.debian.org/debian bookworm main
deb [signed-by=$keyring] http://deb.debian.org/debian-security bookworm-security main
END
    cat > "$folder/apt/conf" << END
APT::Architecture "arm64";
APT::Architectures { "arm64"; "amd64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::State "$folder/apt/state";
Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
Dir::Etc::sourcelist "$folder/apt/sources.list";
Dir::Etc::sourceparts "-";
END
    export APT_CONFIG=$folder/apt/conf
}

make_root() {
    make_apt
    apt-get -qq update
    apt-get -qq install --download-only python3.11 libstdc++6
    (cd "$folder" && apt-get -qq download qemu-user-static:amd64)
    for package in "$folder"/apt/cache/archives/*.deb; do
        dpkg -x "$package" "$folder/root"
    done
    # QEMU's other architectures take 350 MB.
    dpkg --fsys-tarfile "$folder"/qemu-user-static_*.deb | tar -x -C "$folder" ./usr/bin/qemu-aarch64-static
    mv "$folder/usr/bin/qemu-aarch64-static" "$folder/qemu"
    rm -r "$folder"/{apt,usr} "$folder"/qemu-user-static_*.deb
    # LLVM reads here which CPU it compiles for, and would read this computer's: QEMU 7.2 hands it through.
    mkdir "$folder/root/proc"
    cat > "$folder/root/proc/cpuinfo" << END
processor	: 0
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1
END
}

# What pyproject.toml asks for, in the versions of constraints.txt, as wheels of aarch64.
make_site() {
    "$python" -c 'import tomllib
for each in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    print(each)' > "$folder/requirements.txt"
    "$python" -m pip install --quiet --target "$folder/site" -r "$folder/requirements.txt" -c constraints.txt \
        --only-binary=:all: --implementation cp --python-version 3.11 --platform manylinux2014_aarch64 \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_31_aarch64
}

# An interpreter that starts others of its kind: for Python its name (-0) is this script's, by which it calls
# itself, so that Linux need not be told (binfmt_misc) what to do with programs of aarch64.
make_python() {
    cat > "$folder/python" << END
#!/bin/sh
export PYTHONHOME='$folder/root/usr' PYTHONPATH='$folder/site:$tree/src' NUMBA_CACHE_DIR='$folder/kernels-aarch64'
exec '$folder/qemu' -cpu neoverse-n1 -L '$folder/root' -0 '$folder/python' \\
    '$folder/root/usr/bin/python3.11' "\$@"
END
    chmod +x "$folder/python"
}

# Made once, and again if what it is made from has changed. What is removed then must have been made here.
made_from=$(echo "$tree" | cat - tools/aarch64/run.sh pyproject.toml constraints.txt | sha256sum)
if [ "$made_from" != "$(cat "$folder/made_from" 2> /dev/null)" ]; then
    mkdir -p "$folder"
    if [ -n "$(ls -A "$folder")" ] && ! [ -e "$folder/made_from" ]; then
        echo "$folder is not empty, and was not made by this: give another folder" >&2
        exit 1
    fi
    echo "making an aarch64 in $folder" >&2
    : > "$folder/made_from"
    rm -rf "$folder"/{apt,root,usr,qemu,site,python} "$folder"/qemu-user-static_*.deb
    make_root
    make_site
    make_python
    echo "$made_from" > "$folder/made_from"
fi

# digests NAME PYTHON: into the file of that name. Machine code is kept, so that a second run is quicker.
digests() {
    local began=$SECONDS
    export NUMBA_CACHE_DIR=$folder/kernels-$1
    for script in tools/aarch64/digests.py tools/amx_emulator/cases.py; do
        "$2" "$script"
    done > "$folder/$1.txt"
    echo "$1: $(wc -l < "$folder/$1.txt") digests in $((SECONDS - began)) s" >&2
}

"$folder/qemu" --version | head -n 1 >&2
PYTHONPATH=$tree/src digests x86-64 "$python"
digests aarch64 "$folder/python"
if ! diff "$folder/x86-64.txt" "$folder/aarch64.txt"; then
    echo "different" >&2
    exit 1
fi
cat "$folder/aarch64.txt"
echo "all $(wc -l < "$folder/aarch64.txt") digests are equal"
