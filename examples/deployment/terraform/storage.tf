locals {
  volume_policies = merge(
    { ebs = "arn:aws:iam::aws:policy/service-role/AmazonEBSCSIDriverPolicy" },
    var.kms_key_arn == null ? {} : { key = aws_iam_policy.volume_key[0].arn },
  )
}

# What the EBS driver does with a key of yours.
resource "aws_iam_policy" "volume_key" {
  count = var.kms_key_arn == null ? 0 : 1
  name  = "ragcache-volume-key"
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect   = "Allow"
      Action   = ["kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey*", "kms:ReEncrypt*"]
      Resource = var.kms_key_arn
    }]
  })
}

# The class of the values in ../helm. One node mounts a volume at a time, in the zone of its pod.
resource "kubernetes_storage_class_v1" "ragcache" {
  metadata {
    name = "ragcache"
  }
  storage_provisioner    = "ebs.csi.aws.com"
  volume_binding_mode    = "WaitForFirstConsumer"
  reclaim_policy         = "Retain"
  allow_volume_expansion = true
  parameters = merge(
    { type = "gp3", iops = "6000", throughput = "500", encrypted = "true" },
    var.kms_key_arn == null ? {} : { kmsKeyId = var.kms_key_arn },
  )
}
