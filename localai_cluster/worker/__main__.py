"""`python -m localai_cluster.worker`."""

from localai_cluster.worker.main import main

if __name__ == "__main__":
    main()
