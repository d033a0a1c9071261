"""What a job or a user may put in the place of a file: each function makes one kind of thing at a path."""

import os
import shutil
import socket

__all__ = ["KINDS", "emptied"]


def put_fifo(place):
    os.mkfifo(place)


def put_dangling(place):
    place.symlink_to(place.with_name("nothing"))


def put_outside(place):
    place.symlink_to(place.parents[2] / "secret")


def put_loop(place):
    place.symlink_to(place)


def put_folder(place):
    place.mkdir()


def put_huge(place):
    place.touch()
    os.truncate(place, 100 << 30)


def put_unreadable(place):
    place.write_text("{}")
    place.chmod(0)


def put_device(place):
    place.symlink_to("/dev/zero")


def put_socket(place):
    with socket.socket(socket.AF_UNIX) as server:
        before = os.getcwd()
        os.chdir(place.parent)
        try:
            server.bind(place.name)
        finally:
            os.chdir(before)


KINDS = [put_fifo, put_dangling, put_outside, put_loop, put_folder, put_huge, put_unreadable, put_device, put_socket]


def emptied(place):
    """The place, with nothing there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    return place
