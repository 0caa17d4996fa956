"""The script that reproduces a finding with torch alone."""
