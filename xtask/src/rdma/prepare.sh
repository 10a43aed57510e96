#!/bin/sh
# prepare.sh FOLDER INIT: puts Debian's kernel, which is not installed here, and an initial file
# system with INIT as its first process into FOLDER.
set -eu
cd "$1"
apt-get update -qq
package=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\)$/\1/p')
if [ -z "$package" ]
then
    echo "apt knows no kernel for linux-image-amd64: this needs Debian's packages of amd64" >&2
    exit 1
fi
version=${package#linux-image-}
echo "Linux $version"
if [ ! -e "root/boot/vmlinuz-$version" ]; then
    rm -rf root root.new "$package"_*.deb
    apt-get download -qq "$package"
    dpkg-deb --extract "$package"_*.deb root.new
    rm "$package"_*.deb
    depmod -b root.new "$version"
    mv root.new root
fi
rm -rf initial
mkdir -p initial/bin initial/modules
cp "$(command -v busybox)" initial/bin/busybox
cp "$2" initial/init
chmod +x initial/init
# With the modules that each needs, which it must not be loaded before. rdma_rxe does not say that
# it needs crc32_generic.
for module in virtio_pci 9pnet_virtio 9p overlay dummy crc32_generic rdma_rxe ib_uverbs rdma_ucm
do
    modprobe -d root -S "$version" --show-depends "$module"
done > needed
sed -n 's/^insmod \([^ ]*\).*/\1/p' needed | awk '!seen[$0]++' > initial/modules/paths
while read -r path
do
    cp "$path" initial/modules/
    basename "$path"
done < initial/modules/paths > initial/modules/order
(cd initial && find . | busybox cpio --quiet -o -H newc | gzip -1) > initial.gz
cp "root/boot/vmlinuz-$version" vmlinuz
