"""``python -m pollux``: the same program as the ``pollux`` command."""

if __name__ == "__main__":
    from pollux.cli.main import main

    main()
