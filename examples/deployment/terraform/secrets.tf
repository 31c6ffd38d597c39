# The engine's API key. Terraform's state has it too: keep the state encrypted, or make the secret by hand.
resource "random_password" "api_key" {
  length  = 48
  special = false
}

resource "kubernetes_secret_v1" "engine" {
  metadata {
    name = "engine"
  }
  data = { "api-key" = random_password.api_key.result }
}

output "api_key" {
  value     = random_password.api_key.result
  sensitive = true
}
