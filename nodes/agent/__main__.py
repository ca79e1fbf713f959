"""`python -m nodes.agent`."""

from nodes.agent.main import main

if __name__ == "__main__":
    main()
