"""From files that users write to the parts of a run: configuration, machines, profiles, tables, policies, arrivals."""
