"""What `make check-deployment` checks of the Helm chart and of Terraform; it needs requirements/publish.txt alone."""
