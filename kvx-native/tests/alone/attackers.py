"""Attacks every socket on which a process listens, as another user: SECONDS PID HELLO.

HELLO, in hexadecimal digits, is the first message of an unauthenticated peer over TCP.

Prints for each socket, in a line: its family, the number of connections, and the received messages.
"""

import collections
import glob
import os
import random
import socket
import sys
import time

NOBODY = 65534
# The limit for each socket; the usual limit of descriptors is 1,024.
OPEN_AT_MOST = 200
LISTENING = {"tcp": "0A", "unix": "00010000"}


def sockets_of(pid):
    """Yields the addresses on which the process listens."""
    inodes = set()
    for name in glob.glob(f"/proc/{pid}/fd/*"):
        try:
            link = os.readlink(name)
        except FileNotFoundError:  # it was closed meanwhile
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    for line in open(f"/proc/{pid}/net/tcp"):
        field = line.split()
        if field[3] == LISTENING["tcp"] and field[9] in inodes:
            address, port = field[1].split(":")
            host = ".".join(str(part) for part in reversed(bytes.fromhex(address)))
            yield socket.AF_INET, socket.SOCK_STREAM, (host, int(port, 16))
    for line in open(f"/proc/{pid}/net/unix"):
        field = line.split()
        if field[3] == LISTENING["unix"] and field[6] in inodes and field[7].startswith("@"):
            yield socket.AF_UNIX, socket.SOCK_SEQPACKET, "\0" + field[7][1:]


class Attack:
    """An attack on one socket: silence, garbage, one byte at a time, and unauthenticated hellos."""

    def __init__(self, family, kind, address):
        self.family, self.kind, self.address = family, kind, address
        self.connections, self.heard = 0, set()
        self.open = collections.deque()

    def turn(self):
        stranger = socket.socket(self.family, self.kind)
        stranger.settimeout(1)
        try:
            stranger.connect(self.address)
        except OSError:  # for example because its backlog is full
            stranger.close()
            return
        stranger.setblocking(False)
        self.connections += 1
        way = self.connections % 4
        self.open.append((stranger, way))
        if way == 1:
            self.say(stranger, random.randbytes(random.choice([1, 16, 40, 1000, 60000])))
        if way == 3 and self.family == socket.AF_INET:
            self.say(stranger, bytes.fromhex(sys.argv[3]))
        for slow in [one for one, way in list(self.open)[-20:] if way == 2]:
            self.say(slow, b"\1" if random.random() < 0.5 else b"\0")
        if len(self.open) > OPEN_AT_MOST:
            self.end(self.open.popleft()[0])

    def say(self, stranger, what):
        try:
            stranger.send(what)
        except OSError:
            pass

    def end(self, stranger):
        try:
            while heard := stranger.recv(65536):
                self.heard.add(heard.hex())
        except OSError:
            pass
        stranger.close()

    def result(self):
        for stranger, _ in self.open:
            self.end(stranger)
        return f"{self.family.name} {self.connections} {','.join(sorted(self.heard))}"


attacks = [Attack(*each) for each in sockets_of(sys.argv[2])]
os.setgroups([])
os.setresgid(NOBODY, NOBODY, NOBODY)
os.setresuid(NOBODY, NOBODY, NOBODY)
print("begun", flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    for attack in attacks:
        attack.turn()
for attack in attacks:
    print(attack.result(), flush=True)
