#!/bin/sh
# Makes the certificates in this folder. They are committed, so that the tests need no openssl, and end in a hundred
# years; the keys protect nothing. Run in an empty copy of this folder.
set -e

make_ca() { # name
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 \
        -subj "/CN=$1 of the tests of rpcdataloader" -keyout "$1.key" -out "$1.pem" \
        -addext keyUsage=critical,keyCertSign,cRLSign
}

make_certificate() { # name, CA, subjectAltName, first day, last day, purposes
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$1" \
        -keyout "$1.key" -out "$1.csr"
    printf 'subjectAltName=%s\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=%s\n' "$3" "${6:-$both}" > ext
    : > index
    mkdir -p issued
    openssl ca -batch -notext -cert "$2.pem" -keyfile "$2.key" -in "$1.csr" -out "$1.pem" \
        -startdate "$4" -enddate "$5" -extfile ext -config /dev/stdin <<CONFIG
[ca]
default_ca = tests
[tests]
database = index
new_certs_dir = issued
default_md = sha256
policy = names
rand_serial = yes
[names]
commonName = supplied
CONFIG
}

both=serverAuth,clientAuth
here=DNS:localhost,IP:127.0.0.1,IP:::1
make_ca ca
make_ca other-ca
make_certificate node ca "$here" 20240101000000Z 21240101000000Z
make_certificate stranger other-ca "$here" 20240101000000Z 21240101000000Z
make_certificate expired ca "$here" 20240101000000Z 20240102000000Z
make_certificate early ca "$here" 21230101000000Z 21240101000000Z
make_certificate elsewhere ca DNS:node99.example 20240101000000Z 21240101000000Z
make_certificate servers-only ca "$here" 20240101000000Z 21240101000000Z serverAuth
openssl pkey -in node.key -aes256 -passout pass:secret -out locked.key
# Whoever has the keys of the CAs could make more.
rm -rf ca.key other-ca.key ./*.csr ext index* issued
