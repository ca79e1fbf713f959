"""Operations: durable, leased, observable units of work. This package knows nodes only by their ids."""
